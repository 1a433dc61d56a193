"""A save as one commit: files written beside, a manifest last, and who may write a path.

``steps`` has what others use: :func:`~phalanx.saving.steps.open_step`, :func:`~phalanx.saving.steps.read_step` and
:func:`~phalanx.saving.steps.listed`. What is decided (``manifest``, ``decide``) knows no files; what acts on files
(``places``, ``holding``, ``steps``) asks it.
"""

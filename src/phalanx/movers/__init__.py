"""How buckets of weights travel: one contract, and a mover for each distance.

* `contract`: what the two ends of a mover do; `clock` and `peers` are what they share.
* `local`: roles of one process: a copy, or shared storage.
* `ring`: ranks of one node: a ring of shared segments per source, filled by it and read by its targets, with a unix
  socket to each whose end tells a death at once. `segments` are its memory: anonymous host memory, or, in `ipc`,
  memory of a device.
* `process_group`: ranks of any nodes: point to point over a process group that spans both groups.
* `store`: ranks of any nodes: each bucket once through an object store that the caller supplies.

Nothing here knows of groups, epochs or calls. Ends are made by the worker for a pair of epochs and closed with it;
after any error they are closed and made anew.
"""

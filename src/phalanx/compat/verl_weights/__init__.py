"""A checkpoint engine of verl's, ``checkpoint_engine.backend=phalanx``, on the movers of this package.

* `windows`: a stream of named tensors as buckets that say themselves what lies in them.
* `routes`: which rank of the actor serves which rank of the rollout, and by which mover.
* `shelf`: buckets in Ray's object store, for ranks on other nodes.
* `engine`: the two ends; nothing of verl.
* `registration`: the engine in verl's registry. The overlay imports it with verl's registry; under verl's own
  controller ``checkpoint_engine.custom_backend_module=phalanx.compat.verl_weights.registration`` does.
"""

"""How weights get from one layout to another: boxes, manifests, plans, digests, deltas, versions. Nothing moves here.

What lies where, in the order of a sync:

* `readers` (on each rank): the tensors of a model -> a `Manifest` and the local tensors by name.
* `planner` (on the driver, once per pair of epochs): the manifests of both sides -> a `Plan`.
* `buckets` (on each rank): the plan -> the stream of buckets that a source sends; `tensors` cuts the pieces.
* `phalanx.movers`: carries the buckets.
* `digests` (on each rank): what was sent and what arrived, compared per piece.
* `delta`: only the bits that changed. `versions`: none, whole or torn. `explain`: the plan for people.
"""

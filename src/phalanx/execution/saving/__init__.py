"""What the ranks do for a save and a load, asked by the driver (`phalanx.runtime.saving`).

* `tree`: a state as leaves by key, and back.
* `parts`: which leaves the parts of a worker have, how they are sharded, and what becomes of loaded ones.
* `write`, `read`: the items of a rank's file.
* `questions`: the functions that the driver has run here.
"""

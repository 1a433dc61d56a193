"""What the ranks do for a sync of weights, asked by the driver's link (`phalanx.runtime.links`).

* `orders`: what is asked and what is answered, as values.
* `book`: what this rank publishes and accepts, in which versions; whether methods may run.
* `ends`: a rank's part of one plan, with the ends of its movers; `source` and `target` send and receive over them.
* `questions`: the functions that the driver has run here.
"""

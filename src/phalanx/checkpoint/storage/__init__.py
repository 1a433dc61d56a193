"""Files of checkpoints: steps, manifests, locks and plans."""

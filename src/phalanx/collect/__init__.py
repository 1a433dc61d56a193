"""From the outcomes of all ranks to one value, or one error. Pure."""

"""vLLM through a group against vLLM alone; runs in the environment of vLLM."""

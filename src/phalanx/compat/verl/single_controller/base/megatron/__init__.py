"""Workers and groups on megatron-core, of verl's earlier line."""

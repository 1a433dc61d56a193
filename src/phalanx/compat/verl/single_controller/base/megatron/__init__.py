"""Workers on megatron-core, of verl's earlier line."""

"""What `protocol` and `utils.tensordict_utils` are made of; import those."""

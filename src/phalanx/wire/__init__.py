"""What crosses process borders: the codec for arguments and results, and the messages of a call."""

"""Messages between processes: the codec for arguments and results, exceptions, and the call page."""

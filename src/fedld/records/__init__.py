"""The schema of a run's files: the writer, the reader, and tables made of them."""

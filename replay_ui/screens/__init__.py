"""One page a file; each has `page()`."""

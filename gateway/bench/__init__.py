"""`tokentape bench`: what routing is worth here, against large-only and what one would use instead."""

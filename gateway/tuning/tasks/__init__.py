"""Tasks that policies are evaluated on: prompts, and how an answer is scored."""

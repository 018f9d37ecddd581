"""The large model on an engine elsewhere: vLLM, SGLang, or any server whose completions take token ids."""

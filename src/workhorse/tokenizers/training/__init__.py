"""New tokenizers, trained on texts that come one by one."""

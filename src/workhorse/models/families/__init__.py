"""Model families as data: presets, readers of Hugging Face configs, and tensor names."""

"""Reading and writing of Hugging Face directories."""

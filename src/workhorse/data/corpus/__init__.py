"""Where text comes from: files, documents, and which of them are held out."""

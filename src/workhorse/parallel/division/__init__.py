"""How ranks divide a model: FSDP, and tensor, context, pipeline and expert parallelism."""

"""Sharded weights and tensor, context, pipeline and expert parallelism; the part of each rank."""

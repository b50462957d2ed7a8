"""The processes of a run: launching, rendezvous, process groups and collectives."""

"""Optimizers: update rules, parameter groups, master weights and learning-rate schedules."""

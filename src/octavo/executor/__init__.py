"""Executors send one `SchedulerOutput` to every rank and return one model output."""

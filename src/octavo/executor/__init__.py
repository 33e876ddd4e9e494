"""Carries one `SchedulerOutput` to every rank and brings one answer back."""

"""What steps take from output to output, and how much of it is computing."""

from octavo.scheduler.busy_time import BusyTime


def test_time_between_steps_is_the_hosts_while_there_is_work() -> None:
    now = [0.0]
    busy = BusyTime(lambda: now[0])
    for output_s, scheduled_s, compute_s, has_more in (
        (1.0, 0.1, 0.8, True),
        (2.0, 1.2, 0.7, False),  # from 1.0 on
        (9.0, 8.5, 0.4, True),  # idle until 8.5
        (9.5, 9.1, None, True),  # not timed
        (9.1, 9.6, 0.2, True),  # the clock was set
    ):
        now[0] = output_s
        busy.record(compute_s, scheduled_s, has_more=has_more)
    assert round(busy.step_s, 6) == 0.9 + 1.0 + 0.5
    assert round(busy.compute_s, 6) == 0.8 + 0.7 + 0.4

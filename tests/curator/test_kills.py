"""Real kills: a process that dies by SIGKILL has never let more leave than it paid for."""

import pytest

from curator.killing import check_report, drive


def test_kills_at_random_instants_overcharge_one_step_at_most_and_never_undercharge(make):
    check_report(drive(make(per_token="2^-24"), kills=6, order="right", seed=1), kills=6)


def test_the_driver_reports_undercounts_where_tokens_leave_before_the_commit(make):
    report = drive(make(per_token="2^-24"), kills=6, order="release-first", seed=2)
    assert report["undercounts"] > 0
    with pytest.raises(AssertionError):
        check_report(report, kills=6)

"""The release keeps what a release must, as far as tests can see."""

from paclm_plugin_template.response import RULE

from paclm.study.rule_checks import rule_problems


def test_the_release_breaks_no_rule():
    assert rule_problems(RULE) == []

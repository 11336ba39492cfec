"""The report: one page that opens offline, and the same tables and figures as files."""

import os
import re
from html.parser import HTMLParser

import pytest

from paclm.errors import InvalidInput
from paclm.study.regimes import census, flatness
from paclm.study.report import inline_svg, typeset, write_report
from paclm.study.run import run_regime
from study.small_lab import open_lab


class Page(HTMLParser):
    """What a browser would see."""

    VOID = ("meta", "br", "hr", "img", "link", "input")
    KINDS = {"id": "ids", "href": "links", "xlink:href": "links"} | dict.fromkeys(
        ("src", "srcset", "action", "data"), "loads"
    )

    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.loads, self.tags, self.open = [], [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            if name in self.KINDS and value:
                getattr(self, self.KINDS[name]).append(value)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def written(study_template, tmp_path_factory):
    lab = open_lab(study_template, tmp_path_factory.mktemp("report") / "workspace")
    usual = os.umask(0)  # files for everybody, unless they are written as private ones
    try:
        run_regime(lab, census.REGIME, "quick", scale=census.CensusScale(40))
        run_regime(lab, flatness.REGIME, "quick", scale=flatness.FlatnessScale(40, 2))
        return write_report(lab.folder)
    finally:
        os.umask(usual)


@pytest.fixture(scope="module")
def text(written):
    return written.page.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(text):
    return Page(text)


def test_the_page_loads_nothing_and_runs_nothing(page, text):
    assert page.loads == []
    assert "script" not in page.tags
    assert "link" not in page.tags
    assert all(link.startswith("#") for link in page.links)
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)


def test_every_id_is_there_once_and_every_link_leads_to_one(page):
    assert len(page.ids) == len(set(page.ids))
    assert {link.removeprefix("#") for link in page.links} <= set(page.ids)
    assert page.open == [], "every element is closed"
    assert {"short", "reading", "setup", "census", "flatness", "origin"} <= set(page.ids)
    assert "sessions" not in page.ids, "a regime that was not run"


def test_tables_and_figures_are_on_the_page_and_on_the_disk(written, page):
    labels = {path.stem for path in written.tables}
    assert labels == {"tab_census", "tab_flatness", "tab_flatness_closing", "tab_setup", "tab_eval_regimes"}
    assert {path.stem for path in written.figures} == {"fig_flatness", "fig_mechanism"}
    for path in written.tables:
        assert all(path.with_suffix(suffix).stat().st_size for suffix in (".md", ".csv", ".tex"))
    for path in written.figures:
        assert path.with_suffix(".pdf").read_bytes().startswith(b"%PDF")
    assert page.tags.count("svg") == 2
    assert {"tab-census", "fig-flatness"} <= set(page.ids)


def test_what_a_study_writes_is_for_its_owner_alone_under_every_umask(written):
    files = sorted(written.page.parent.rglob("*"))
    assert {".html", ".json", ".md", ".svg", ".pdf"} <= {path.suffix for path in files}
    assert [path for path in files if path.stat().st_mode & 0o077] == []


def test_the_page_says_what_was_run_beside_the_papers_values_and_is_the_same_when_written_again(written, text):
    paper = '<span class="paper">[0.834]</span>'
    for part in ("NOT PRIVATE", "quick", "positions 40", "k = 1,000", "results/census.json", paper):
        assert part in text
    assert write_report(written.page.parent).page.read_text(encoding="utf-8") == text


def test_results_of_different_seeds_on_one_page_are_pointed_out(study_template, tmp_path, text):
    assert "different presets" not in text
    for seed, (module, scale) in enumerate(
        ((census, census.CensusScale(20)), (flatness, flatness.FlatnessScale(20, 1)))
    ):
        lab = open_lab(study_template, tmp_path / "workspace", seed=seed)
        run_regime(lab, module.REGIME, "quick", scale=scale)
    assert "different presets" in write_report(lab.folder).page.read_text(encoding="utf-8")


def test_without_results_there_is_no_report(tmp_path):
    with pytest.raises(InvalidInput, match="no results"):
        write_report(tmp_path)


def test_powers_and_minus_signs_are_set_and_what_looks_like_html_is_not():
    assert str(typeset("b = 2^-16")) == "b = 2<sup>−16</sup>"
    assert str(typeset("3.1e+04 and 2e-05")) == "3.1×10<sup>4</sup> and 2×10<sup>−5</sup>"
    assert str(typeset("-0.5 but T-5")) == "−0.5 but T-5"
    assert str(typeset("<unk> & co")) == "&lt;unk&gt; &amp; co"


def test_an_inlined_drawing_keeps_its_ids_to_itself_and_has_a_name():
    opening = '<?xml version="1.0"?><!DOCTYPE svg><svg width="9pt" height="5pt" viewBox="0 0 9 5">'
    svg = opening + '<g id="a"/><use xlink:href="#a"/></svg>'
    inlined = inline_svg(svg, "fig_x", 'A "name"')
    assert inlined.startswith('<svg viewBox="0 0 9 5" role="img" aria-label="A &quot;name&quot;">')
    assert '<g id="fig_x-a"/><use xlink:href="#fig_x-a"/>' in inlined

"""The page as one file: everything is inside, and nothing of a report can become a script."""

import re
from pathlib import Path

from slackwater.web import page


def test_the_file_has_all_and_asks_for_nothing(tmp_path: Path) -> None:
    page.write(tmp_path / "index.html", "A report", {"title": "x", "changes": {}, "now_s": 1.0})
    text = (tmp_path / "index.html").read_text()
    assert not re.findall(r'<(?:script|img|link)[^>]* (?:src|href)="(?!data:)', text)
    for name in page.files():
        assert (page.FOLDER / name).read_text()[:200] in text
    assert (page.FOLDER / "vendor/uplot/LICENSE").is_file()


def test_text_of_a_report_stays_text() -> None:
    evil = "</script><script>alert(1)</script><!--"
    text = page.file(evil, {"title": evil, "changes": {}, "now_s": 0.0})
    assert "<script>alert" not in text
    assert text.count("</script>") == len(page.SCRIPTS) + 1


def test_scripts_set_text_and_no_markup() -> None:
    for name in page.SCRIPTS[1:]:
        text = (page.FOLDER / name).read_text()
        assert "innerHTML" not in text, name
        assert "outerHTML" not in text, name
        assert "insertAdjacentHTML" not in text, name
        assert "eval(" not in text, name

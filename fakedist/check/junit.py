"""JUnit XML for CI services: one suite per job and rank, one case per figure.

It is valid against both schemas in use: Jenkins' (xunit plugin) and Apache Ant's (windyroad/JUnit-Schema).
"""

from __future__ import annotations

import datetime
import re
import socket
from xml.etree import ElementTree

from fakedist.check.checking import Checked
from fakedist.check.judging import Finding

_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_text(checked: Checked) -> str:
    """The result of a check as JUnit XML. A script that failed is an error, an exceeded figure is a failure."""
    root = ElementTree.Element("testsuites")
    by_rank: dict[str, list[Finding]] = {}
    for finding in checked.findings:
        by_rank.setdefault(f"{finding.job} rank {finding.rank}", []).append(finding)
    for number, (name, findings) in enumerate(by_rank.items()):
        suite = _suite(root, name, number, len(findings), failures=sum(each.is_exceeded for each in findings))
        for finding in findings:
            case = _case(suite, finding.name, name)
            if finding.is_exceeded:
                _told(case, "failure", "budget" if finding.is_over_budget else "baseline", finding.message)
        _outputs(suite, "\n".join((*checked.warnings, *checked.notes)))
    for number, failure in enumerate(checked.failures, start=len(by_rank)):
        name = failure.message.partition(":")[0]
        suite = _suite(root, name, number, 1, errors=1)
        _told(_case(suite, "runs", name), "error", "script", failure.message)
        _outputs(suite, failure.output)
    for number, misfit in enumerate(checked.misfits, start=len(by_rank) + len(checked.failures)):
        name = misfit.partition(" does")[0]
        suite = _suite(root, f"{name} fits", number, 1, failures=1)
        _told(_case(suite, "fits the GPU", name), "failure", "out_of_memory", misfit)
        _outputs(suite, "")
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True).replace("'utf-8'", "'UTF-8'") + "\n"


def _suite(root: ElementTree.Element, name: str, number: int, tests: int, **counts: int) -> ElementTree.Element:
    now = datetime.datetime.now().replace(microsecond=0).isoformat()
    attributes = {
        "name": _clean(name),
        "package": "fakedist",
        "id": str(number),
        "timestamp": now,
        "hostname": socket.gethostname() or "localhost",
        "tests": str(tests),
        "failures": str(counts.get("failures", 0)),
        "errors": str(counts.get("errors", 0)),
        "time": "0",
    }
    suite = ElementTree.SubElement(root, "testsuite", attributes)
    ElementTree.SubElement(suite, "properties")
    return suite


def _case(suite: ElementTree.Element, name: str, of: str) -> ElementTree.Element:
    classname = f"fakedist.{of.replace(' rank ', '.rank')}"
    attributes = {"name": _clean(name), "classname": _clean(classname), "time": "0"}
    return ElementTree.SubElement(suite, "testcase", attributes)


def _told(case: ElementTree.Element, tag: str, kind: str, message: str) -> None:
    clean = _clean(message)
    ElementTree.SubElement(case, tag, {"message": clean, "type": kind}).text = clean


def _outputs(suite: ElementTree.Element, text: str) -> None:
    ElementTree.SubElement(suite, "system-out").text = _clean(text)
    ElementTree.SubElement(suite, "system-err")


def _clean(text: str) -> str:
    """Remove characters that XML cannot hold."""
    return _NOT_XML.sub("?", text)

"""Host versions are refused by name; each exception to "never reassign" does what it says."""

import argparse
import importlib.util

import pytest

pytest.importorskip("megatron.core", reason="needs the extra [train]")

from megatron.core.datasets import utils as dataset_utils

from megatron_hbp.host import compat


def test_the_installed_host_is_supported():
    compat.check_host_version()
    assert compat.host_version().startswith("0.19.")


@pytest.mark.parametrize("version", ["0.18.1", "0.20.0", "0.20.0rc0", "0.190.0", "1.19.2"])
def test_other_versions_are_refused_by_name(monkeypatch, version):
    monkeypatch.setattr(compat, "host_version", lambda: version)
    with pytest.raises(RuntimeError) as refused:
        compat.check_host_version()
    assert str(refused.value) == (
        f"megatron-core {version} is not supported; this release runs with 0.19.x: pip install "
        "'megatron-core==0.19.*'"
    )


@pytest.mark.parametrize("version", ["0.19", "0.19.0", "0.19.2", "0.19.3rc1"])
def test_every_patch_release_is_supported(monkeypatch, version):
    monkeypatch.setattr(compat, "host_version", lambda: version)
    compat.check_host_version()


def test_a_missing_host_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        RuntimeError, match=r"megatron-core is not installed; install the extra: pip"
    ):
        compat.host_version()


@pytest.mark.parametrize(
    ("files", "replaced"),
    [
        (["helpers_cpp.cpython-312.so"], True),
        (["helpers_cpp.cpython-312.so", "Makefile"], False),
        ([], False),
    ],
)
def test_the_helpers_are_compiled_unless_they_come_without_a_makefile(
    tmp_path, monkeypatch, files, replaced
):
    for name in files:
        (tmp_path / name).touch()

    def original():
        raise AssertionError("called")

    monkeypatch.setattr(dataset_utils, "__file__", str(tmp_path / "utils.py"))
    monkeypatch.setattr(dataset_utils, "compile_helpers", original)
    compat.use_bundled_dataset_helpers()
    assert (dataset_utils.compile_helpers is not original) == replaced
    if replaced:
        dataset_utils.compile_helpers()


def test_help_texts_with_a_bare_percent_sign_print():
    """Good texts keep their %(default)s; a bare % is shown as it is."""
    parser = argparse.ArgumentParser(prog="x")
    parser.add_argument("--good", default=3, help="default: %(default)s, 5%% of all")
    parser.add_argument("--bad", help="most (90%) of all")
    parser.add_argument("--hidden", help=argparse.SUPPRESS)
    parser.add_argument("--none")
    with pytest.raises(ValueError, match="unsupported format character"):
        parser.format_help()
    compat.make_help_printable(parser)
    text = parser.format_help()
    assert "default: 3, 5% of all" in text
    assert "most (90%) of all" in text
    assert "--hidden" not in text

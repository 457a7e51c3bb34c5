"""model_digest: other weights are another model, wherever they lie and whatever they are called."""

from __future__ import annotations

from pathlib import Path

from steploop.batch.model_digest import model_digest


def test_it_is_of_contents(tmp_path: Path) -> None:
    for folder, byte in (("a", b"x"), ("b", b"x"), ("c", b"y")):
        (tmp_path / folder / "m").mkdir(parents=True)
        (tmp_path / folder / "m" / "config.json").write_text("{}")
        (tmp_path / folder / "m" / "model.safetensors").write_bytes(bytes(200_000) + byte)
        (tmp_path / folder / "m" / "notes.txt").write_text(folder)
    a, b, c = (model_digest(tmp_path / folder / "m") for folder in "abc")
    assert a == b != c
    assert model_digest(tmp_path / "a" / "m" / "model.safetensors") not in (a, "")
    assert model_digest("someone/on-the-hub") == model_digest(tmp_path) == ""

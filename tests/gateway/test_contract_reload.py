"""A bad file is reported once, however often it is read again."""

from __future__ import annotations

from pathlib import Path

from tests.fakes.engine import FakeEngine
from tests.fakes.running import in_loop
from tests.gateway.reloading import Heard, Reloading, write


@in_loop
async def test_a_bad_file_that_is_read_again_is_not_reported_again(tmp_path: Path) -> None:
    file = tmp_path / "slotgate.yaml"
    async with FakeEngine() as engine:
        write(file, engine.url)
        with Heard() as log:
            async with Reloading(file) as slotgate:
                for text in ("backends: [", "backends: [", "nothing: here"):
                    file.write_text(text)
                    await slotgate.gateway.reload()
                    assert slotgate.metric("config_reload_success") == 0
                write(file, engine.url)
                await slotgate.gateway.reload()
                file.write_text("backends: [")
                await slotgate.gateway.reload()
        failed = [line["failed"] for line in log.lines("reload") if "failed" in line]
        first = [line for line in failed if "is not YAML" in line]
        assert len(first) == 2, "once, and once more after it had been right in between"
        assert len(failed) > len(first), "another mistake is another report"

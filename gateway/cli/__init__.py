"""The `slotgate` command."""

"""Files of a machine that tests make up, under a root of its own."""

import shutil


class FakeMachine:
    """Where code that looks at /proc, /sys or /dev looks instead."""

    def __init__(self, root, monkeypatch):
        self.root, self.patch = root, monkeypatch

    def write(self, path, text):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def remove(self, path):
        shutil.rmtree(self.root / path)

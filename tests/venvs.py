"""Small virtual environments for tests, of an interpreter that is a script."""

from pathlib import Path

CONFIG = "home = {home}\ninclude-system-site-packages = false\nversion = {version}.2\n"


def interpreter(base: Path, version: str = "3.11") -> Path:
    """Make an interpreter as far as its files tell."""
    python = base / "bin" / f"python{version}"
    library = base / "lib" / f"python{version}"
    for folder in (python.parent, library):
        folder.mkdir(parents=True, exist_ok=True)
    (library / "os.py").write_text("")
    python.write_text('#!/bin/sh\necho "ran $@"\n')
    python.chmod(0o755)
    return python


def environment(folder: Path, base: Path, version: str = "3.11") -> Path:
    """Make an environment with one module and three scripts."""
    packages = folder / "lib" / f"python{version}" / "site-packages"
    for each in (folder / "bin", packages / "__pycache__"):
        each.mkdir(parents=True)
    (folder / "pyvenv.cfg").write_text(CONFIG.format(home=base / "bin", version=version))
    (folder / "lib64").symlink_to("lib")
    (folder / "bin" / "python").symlink_to(interpreter(base, version))
    (folder / "bin" / "python3").symlink_to("python")
    (folder / "bin" / "activate").write_text(f"VIRTUAL_ENV={folder}")
    (packages / "sent.py").write_text("value = 42\n")
    (packages / "__pycache__" / "sent.cpython-311.pyc").write_text("compiled")
    short = f"#!{folder}/bin/python3\nimport sent\n"
    long = f"#!/bin/sh\n'''exec' \"{folder}/bin/python3\" \"$0\" \"$@\"\n' '''\nimport sent\n"
    for name, text in (("short", short), ("long", long), ("other", "#!/bin/sh\necho other\n")):
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    return folder

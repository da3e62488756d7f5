"""`slackwater submit --workdir` and `--venv`: the code folder and the virtual environment, packed
and stored for the nodes that lack them."""

from collections.abc import Callable
from pathlib import Path

from slackwater.common.base.errors import Rejected
from slackwater.common.store import code_packs, venv_packs
from slackwater.common.store.packs import Pack
from slackwater.console.outcome import Usage, err
from slackwater.schemas.jobs import JobSpec


def packed(folder: Path) -> Pack:
    """Pack the code folder. Raises Usage."""
    return _packed("--workdir", code_packs.pack, folder)


def packed_venv(folder: Path) -> Pack:
    """Pack the virtual environment, and warn of what of it the nodes will lack. Raises Usage."""
    found = _packed("--venv", venv_packs.pack, folder)
    for warning in venv_packs.Venv(folder).warnings():
        err.print(f"--venv: {warning}", markup=False)
    return found


def _packed(option: str, pack: Callable[[Path], Pack], folder: Path) -> Pack:
    try:
        return pack(folder)
    except (Rejected, OSError) as error:
        raise Usage(f"{option}: {error}") from error


def within(folder: Path | None) -> str:
    """Return the folder of the code that the program runs in. Raises Usage."""
    if folder is None:
        return ""
    if folder.is_absolute() or ".." in folder.parts:
        raise Usage(f"--folder {folder} beside --workdir: give a folder within the code")
    return "" if str(folder) == "." else str(folder)


def check_program(spec: JobSpec, venv: Path) -> None:
    """Raises Usage where the program is not one that the nodes find in the environment."""
    if not spec.program:
        raise Usage("--venv: the job runs no program; give -- COMMAND, or leave it out")
    program = Path(spec.program[0])
    if len(program.parts) > 1 and program.absolute().is_relative_to(venv.absolute()):
        raise Usage(
            f"--venv: {program} is where your machine has it; give -- {program.name}, which nodes "
            "find in their copy"
        )

"""What a built wheel and sdist hold, read from the files."""

import email
import tarfile
import zipfile


def wheel_files(path):
    """Names of the files in a wheel."""
    with zipfile.ZipFile(path) as wheel:
        return set(wheel.namelist())


def wheel_metadata(path):
    """The METADATA of a wheel, as a message."""
    with zipfile.ZipFile(path) as wheel:
        (name,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(wheel.read(name))


def sdist_files(path):
    """Names of the files in an sdist, without its top folder."""
    with tarfile.open(path) as sdist:
        return {name.partition("/")[2] for name in sdist.getnames()}

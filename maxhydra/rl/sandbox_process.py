"""The process of a sandboxed Python program: it restricts itself, then runs the program from stdin.

Run as `python -I -S sandbox_process.py FOLDER USER MEMORY SECONDS`, so it imports little. sandbox.py lists the
restrictions.
"""

import ctypes
import os
import resource
import signal
import struct
import sys
import traceback

# Bytes of the largest file that a program can write, and number of open files.
MAX_FILE, MAX_FILES = 16 << 20, 64
READABLE = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime", "/dev/urandom", "/dev/random")


def restrict(folder: str, user: int, memory: int, seconds: int) -> None:
    """Restrict this process for good; OSError if the kernel does not support it."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE, MAX_FILE))
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_FILES, MAX_FILES))
    if memory:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    if user:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    # capset with an empty set: root without capabilities cannot raise its limits.
    header, none = struct.pack("=Ii", 0x20080522, 0), bytes(24)
    _check(_libc.syscall({"x86_64": 126}.get(os.uname().machine, 91), header, none), "capset")
    # Dies with its parent; set after the user, whose change clears it. PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS.
    _check(_libc.prctl(1, signal.SIGKILL, 0, 0, 0), "prctl")
    _check(_libc.prctl(38, 1, 0, 0, 0), "no_new_privs")
    _restrict_files(folder)
    _restrict_calls()


def _check(result: int, what: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


_libc = ctypes.CDLL(None, use_errno=True)

# linux/landlock.h: rights on files, and those on directories.
_EXECUTE, _WRITE, _READ, _LIST = 1 << 0, 1 << 1, 1 << 2, 1 << 3
# Rights that a version of Landlock adds: refer, truncate, ioctl_dev.
_RIGHTS = {1: (1 << 13) - 1, 2: 1 << 13, 3: 1 << 14, 5: 1 << 15}
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446


def _restrict_files(folder: str) -> None:
    """Landlock: read and execute in READABLE and the Python installation, everything below `folder`."""
    version = _check(_libc.syscall(_CREATE_RULESET, None, 0, 1), "Landlock is not available")
    everything = sum(rights for since, rights in _RIGHTS.items() if version >= since)
    # From version 4 also TCP ports, from 6 signals and abstract sockets.
    ports, scopes = 3 * (version >= 4), 3 * (version >= 6)
    attributes = struct.pack("=QQQ", everything, ports, scopes)
    ruleset = _check(_libc.syscall(_CREATE_RULESET, attributes, len(attributes), 0), "Landlock")
    allowed = dict.fromkeys((*READABLE, sys.base_prefix), _EXECUTE | _READ | _LIST)
    allowed |= {"/dev/null": _READ | _WRITE, folder: everything & ~_EXECUTE}
    for path, rights in allowed.items():
        if not os.path.exists(path):
            continue
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", rights if os.path.isdir(path) else rights & ~_LIST, descriptor)
        _check(_libc.syscall(_ADD_RULE, ruleset, 1, rule, 0), f"Landlock rule of {path}")
        os.close(descriptor)
    _check(_libc.syscall(_RESTRICT_SELF, ruleset, 0), "Landlock")
    os.close(ruleset)


# System calls that fail, by number on x86-64 and on 64-bit ARM (None: does not exist there). Grouped by purpose:
# sockets and asynchronous I/O; processes and signals; other processes' memory; mounts and namespaces; the kernel;
# owners, modes and attributes, which Landlock does not cover; limits, priorities and shared memory.
_DENIED: tuple[tuple[int | None, int | None], ...] = (
    *((41, 198), (53, 199), (425, 425), (426, 426), (427, 427)),
    *((57, None), (58, None), (62, 129), (200, 130), (234, 131), (129, 138), (297, 240), (424, 424), (434, 434)),
    *((101, 117), (310, 270), (311, 271), (438, 438), (440, 440)),
    *((165, 40), (166, 39), (155, 41), (161, 51), (272, 97), (308, 268), (428, 428), (429, 429), (430, 430)),
    *((431, 431), (432, 432), (433, 433), (442, 442)),
    *((169, 142), (246, 104), (320, 294), (175, 105), (313, 273), (176, 106), (167, 224), (168, 225), (321, 280)),
    *((298, 241), (250, 219), (248, 217), (249, 218), (164, 170), (227, 112), (159, 171), (305, 266), (170, 161)),
    *((171, 162), (163, 89), (179, 60)),
    *((90, None), (91, 52), (268, 53), (452, 452), (92, None), (93, 55), (94, None), (260, 54), (132, None)),
    *((235, None), (261, None), (280, 88), (188, 5), (189, 6), (190, 7), (197, 14), (198, 15), (199, 16), (76, 45)),
    *((160, 164), (141, 140), (144, 119), (142, 118), (203, 122), (29, 194), (68, 186), (64, 190), (240, 180)),
)
# clone, of which only threads are allowed; clone3, whose flags cannot be read, so that libc uses clone; prlimit64,
# which may only read limits.
_CLONE, _CLONE3, _PRLIMIT = (56, 220), 435, (302, 261)
_CLONE_THREAD = 0x10000
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# linux/filter.h and linux/seccomp.h
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026


def _restrict_calls() -> None:
    """seccomp: a filter of system calls, with all threads of the process."""
    machine = os.uname().machine
    if machine not in _ARCHITECTURES:
        raise OSError(f"seccomp filters are written for {' and '.join(_ARCHITECTURES)}, not {machine}")
    column = list(_ARCHITECTURES).index(machine)
    # Each instruction is (code, jump if true, jump if false, operand); jumps count the instructions to skip.
    code = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, _ARCHITECTURES[machine]), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    # The x32 interface of x86-64 has other numbers.
    code += [(_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _EPERM)]
    for numbers in _DENIED:
        if (number := numbers[column]) is not None:
            code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _EPERM)]
    code += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ENOSYS)]
    # Arguments start at byte 16, eight bytes each, the low half first.
    code += [(_EQUAL, 0, 4, _CLONE[column]), (_LOAD, 0, 0, 16), (_ANY_BIT, 0, 1, _CLONE_THREAD)]
    code += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _EPERM)]
    code += [(_EQUAL, 0, 5, _PRLIMIT[column]), (_LOAD, 0, 0, 32), (_EQUAL, 0, 2, 0), (_LOAD, 0, 0, 36)]
    code += [(_EQUAL, 1, 0, 0), (_RETURN, 0, 0, _EPERM), (_RETURN, 0, 0, _ALLOW)]
    instructions = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in code))
    program = struct.pack("@HP", len(code), ctypes.addressof(instructions))
    # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
    _check(_libc.prctl(22, 2, program, 0, 0), "seccomp is not available")


def main() -> None:
    folder, *limits = sys.argv[1:]
    source = sys.stdin.read()
    try:
        restrict(folder, *map(int, limits))
    except (OSError, ValueError) as error:
        sys.exit(f"no sandbox: {error}")
    sys.argv = ["program.py"]
    try:
        exec(compile(source, "program.py", "exec"), {"__name__": "__main__"})
    except Exception as error:
        # Without the frame of this function.
        trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
        traceback.print_exception(error.with_traceback(trace))
        sys.exit(1)


if __name__ == "__main__":
    main()

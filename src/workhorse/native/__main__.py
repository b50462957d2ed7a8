"""`python -m workhorse.native`: compile the operators for this machine, and say which it has."""

from workhorse.native.operators import LOADERS, resolve

if __name__ == "__main__":
    why_not = resolve(*LOADERS, wait=True).why_not
    for library in LOADERS:
        print(f"{library}: {why_not.get(library, 'ready')}")

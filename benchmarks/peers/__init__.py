"""The same models by others' code. A package that is not installed is named as missing."""

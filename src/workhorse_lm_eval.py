"""Tells the lm-evaluation-harness, when it is imported, of its model type `workhorse`.

The harness has a list of model types and looks for no others. So Python imports this file when it
starts, as `workhorse_lm_eval.pth` beside it says, and it waits for `lm_eval.models`. That costs a
comparison per import. It is no part of the package, and imports nothing until then, because every
Python that starts in the environment pays for what it does.
"""

import sys

WAITS_FOR = "lm_eval.models"
TARGET = "workhorse.lm_eval_model:WorkhorseLM"


class Finder:
    """Finds nothing by itself; what others find under one name gets an addition."""

    def find_spec(self, name, path=None, target=None):
        """Where the harness's own `models` is, so that `register` is called after it."""
        if name != WAITS_FOR:
            return None
        sys.meta_path.remove(self)
        from importlib.util import find_spec

        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module):
                execute(module)
                register()

            spec.loader.exec_module = execute_and_register
        return spec


def register():
    """Enter `workhorse` in the harness's list, to be imported when somebody asks for it."""
    try:
        from lm_eval.api.registry import model_registry
    except ImportError:  # an older harness than we know should go on working without us
        return
    if "workhorse" not in model_registry:
        model_registry.register("workhorse", target=TARGET)


def wait():
    """Have the harness register the model type when it is imported, or now if it was."""
    if WAITS_FOR in sys.modules:
        register()
    elif not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())

import sys

if __name__ == "__main__":
    try:
        from bench.gpu.measures import main
        from training.start.script import launch
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error.name} is not installed: install it, or put its wheel into PYTHONPATH")
    launch(main)

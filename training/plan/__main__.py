from training.start.script import launch

if __name__ == "__main__":
    from training.plan.command import main

    launch(main)

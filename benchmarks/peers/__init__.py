"""The same work on other systems that train in step, side by side with Lockstep. Each of them lives in an environment of its own."""

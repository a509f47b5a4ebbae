"""The runners, the Stores, their handles and the worker."""

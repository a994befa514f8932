"""The suite's version; results of different versions are not compared."""

VERSION = "0.1.0"

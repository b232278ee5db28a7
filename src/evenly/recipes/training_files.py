"""Names of the files in the folder of a recipe's run, beside those of any session."""

SETTINGS = "settings.json"
RESULTS = "results.csv"
LOG = "output.log"
IMAGES = "images"

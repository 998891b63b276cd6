"""The HTML report of `medconv evaluate`: tables, distributions, and pictures of the worst cases."""

REPORTS = ("medconv.features.report.segmentation_report:page",)

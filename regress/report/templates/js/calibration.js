// A chart for each precision of a calibration.

const charts = JSON.parse(byId("data").textContent);
const drawAll = () => charts.forEach((spec, number) => chart(byId(`chart-${number}`), spec));
startTheme(drawAll);
drawAll();

// Search without a server: a page that is opened as a file cannot start a worker, so the script of
// the worker runs in a frame. As with a worker, messages are copies and arrive later.
if (location.protocol === "file:") {
  const send = (data, receive) => {
    const event = new MessageEvent("message", { data: structuredClone(data) })
    setTimeout(() => receive(event))
  }
  window.Worker = class {
    constructor(url) {
      this.frame = document.body.appendChild(document.createElement("iframe"))
      this.frame.hidden = true
      this.inside = this.frame.contentWindow
      this.inside.postMessage = data => send(data, event => this.onmessage?.(event))
      const script = this.inside.document.createElement("script")
      script.src = url
      this.loaded = new Promise(resolve => { script.onload = resolve })
      this.inside.document.body.append(script)
    }

    postMessage(data) {
      send(data, event => this.loaded.then(() => this.inside.dispatchEvent(event)))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
